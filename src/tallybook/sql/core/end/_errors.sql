-- _errors(errors, error): the error history with one more, newest last. Keeps 50: the first 10 and the newest 40.
create or replace function tallybook._errors(p_errors jsonb, p_error jsonb) returns jsonb
language sql immutable as $$
  select case when p_error is null then p_errors
              when jsonb_array_length(coalesce(p_errors, '[]')) < 50
                   then coalesce(p_errors, '[]') || jsonb_build_array(p_error)
              else (p_errors - 10) || jsonb_build_array(p_error) end
$$;
