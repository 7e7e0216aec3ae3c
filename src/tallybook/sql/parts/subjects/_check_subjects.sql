-- _check_subjects(queue, task, subjects, ...): raises TB005 for what no subject may have, naming the first that does
-- not fit.
create or replace function tallybook._check_subjects(p_queue text, p_task text, p_subjects text[], p_args text[],
  p_run_ats timestamptz[], p_priorities int[], p_max_attempts int, p_headers text[], p_options text[]) returns void
language plpgsql immutable as $$
declare
  v_n int := cardinality(p_subjects);
begin
  perform tallybook._check_name('queue', p_queue, 64), tallybook._check_name('task name', p_task, 200),
          tallybook._refuse(p_max_attempts not between 1 and 32767,
                            format('max_attempts %s is out of range', p_max_attempts), 'It goes from 1 to 32767.');
  if v_n is null or cardinality(p_args) is distinct from v_n or cardinality(p_run_ats) <> v_n
     or cardinality(p_priorities) <> v_n or cardinality(p_headers) <> v_n or cardinality(p_options) <> v_n then
    perform tallybook._refuse(true, 'the arrays of subjects have different lengths');
  end if;
  perform tallybook._refuse(true, format('a subject has 1 to 512 bytes, number %s has %s', f.n,
                                         coalesce(octet_length(f.subject), 0)))
     from unnest(p_subjects) with ordinality f(subject, n)
    where f.subject is null or octet_length(f.subject) not between 1 and 512 limit 1;
  perform tallybook._refuse(true, format('subject number %s does not fit', f.n),
                            'Args are one JSON object of at most 1,000,000 bytes; headers have at most 8,000.')
     from unnest(p_args, p_headers) with ordinality f(args, headers, n)
    where f.args is null or left(f.args, 1) <> '{' or octet_length(f.args) > 1200000 or left(f.headers, 1) <> '{'
          or octet_length(f.headers) > 8000 limit 1;
  perform tallybook._check_links(h::jsonb -> 'links') from unnest(p_headers) h where h like '%"links"%'
          and h::jsonb ? 'links';
  perform tallybook._refuse(true, 'a run_at is infinite', 'Complete the subject, or leave run_at out.')
     from unnest(p_run_ats) r where not isfinite(r) limit 1;
  perform tallybook._refuse(true, 'a subject has no fair key', 'Each subject has one job, which comes at its own time.')
     from unnest(p_options) o where o::jsonb ? 'fair_key' limit 1;
  if p_options is not null then perform tallybook._check_options(null, null, o::jsonb) from unnest(p_options) o; end if;
end $$;
