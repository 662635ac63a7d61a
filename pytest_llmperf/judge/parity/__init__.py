"""Whether two trainings learn the same: figures of small ones, held against what rounding does to the plain form."""
