-- series_keep(step, keep): how long the series keeps steps of this length before they are summed up to the next: 0
-- (folds, about a second), 60, 3600 or 86400 seconds. False: it was so already. Errors: TB005. Writes series_step.
-- rights: operator
create or replace function tallybook.series_keep(step int, keep interval) returns boolean
language plpgsql as $$
begin
  if step is null or step not in (0, 60, 3600, 86400) then
    raise exception 'there are no steps of % seconds', coalesce(step::text, 'null') using errcode = 'TB005',
      hint = 'There are 0 (folds), 60, 3600 and 86400.';
  end if;
  if keep is null or keep not between interval '15 min' and interval '100 years' then
    raise exception 'a step cannot be kept for %', coalesce(keep::text, 'null') using errcode = 'TB005',
      hint = 'From 15 min to 100 years.';
  end if;
  update tallybook.series_step s set keep = series_keep.keep where s.step = series_keep.step
    and s.keep <> series_keep.keep;
  return found;
end $$;
