"""Parity: a spec's training, made small and looked at tensor by tensor, beside its plain form in double precision."""
