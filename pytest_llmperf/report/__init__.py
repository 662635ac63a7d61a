"""Results for people and programs: lines, messages and JSON.

Pure, but for one atomic writer. Imports only the nouns, the standard library and, where a table is drawn, rich.
"""
