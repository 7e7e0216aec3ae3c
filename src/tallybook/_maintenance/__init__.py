"""Small services that any worker runs: SQL does the work, these only say when."""
