"""Results for people and programs: lines, messages, pages and JSON."""
