"""``llmperf submit``: a cluster file, checked, as the scripts of a night, given to sbatch or run here."""
