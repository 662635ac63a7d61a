"""A process that has imported everything (``fork_server``), from which launches are forked (``agent``)."""
