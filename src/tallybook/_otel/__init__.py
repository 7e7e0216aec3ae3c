"""What `tallybook.otel` is made of. Nothing here is imported before `instrument` is called."""
