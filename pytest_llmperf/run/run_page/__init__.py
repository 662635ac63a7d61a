"""What a page shows of a run, told by its --perf-json document and what is stored; drawn in report/page/."""
