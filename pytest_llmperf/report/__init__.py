"""Results for people and programs: lines, messages and JSON.

``failure_message`` is what a failing test prints, ``summary_table`` the run's end, ``progress_line`` what moves
meanwhile, ``results_json`` what programs read. May import: ``records``, ``spec``, ``support`` and, where a table is
drawn, rich.
"""
