"""A session that is lost at its commit, so that the outcome is unknown."""

DIES_AT_COMMIT = """
create function dies() returns trigger language plpgsql as $$
begin
  perform pg_terminate_backend(pg_backend_pid());
  return null;
end $$;
create constraint trigger dies after insert on tallybook.audit deferrable initially deferred
  for each row execute function dies()"""
