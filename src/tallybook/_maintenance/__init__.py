"""Small services that any worker runs: SQL does the work, and these modules decide when."""
