-- _subject_options(old, given): the options of a subject's job whose args are replaced. given: those of the new ones,
-- null:
-- all but the version of the args stay as they are.
create or replace function tallybook._subject_options(p_old jsonb, p_given jsonb) returns jsonb
language sql immutable as $$
  select case when p_given is null then p_old - 'version'
         else p_given || jsonb_build_object('subject', p_old -> 'subject') end
$$;
