-- series_keep(step, keep): how long the series keeps steps of this length before they are summed up to the next: 0
-- (folds, about a second), 60, 3600 or 86400 seconds. Returns false if nothing changed. Errors: TB005. Writes
-- series_step.
-- rights: operator
create or replace function tallybook.series_keep(step int, keep interval) returns boolean
language plpgsql as $$
begin
  perform tallybook._refuse(step is null or step not in (0, 60, 3600, 86400),
    format('there are no steps of %s seconds', coalesce(step::text, 'null')),
    'There are 0 (folds), 60, 3600 and 86400.');
  perform tallybook._refuse(keep is null or keep not between interval '15 min' and interval '100 years',
    format('a step cannot be kept for %s', coalesce(keep::text, 'null')), 'From 15 min to 100 years.');
  update tallybook.series_step s set keep = series_keep.keep where s.step = series_keep.step
    and s.keep <> series_keep.keep;
  return found;
end $$;
