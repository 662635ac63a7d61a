"""From a spec to a launch record: hardware, leases, and the process tree that torchrun starts."""
