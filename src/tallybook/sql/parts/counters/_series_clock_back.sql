-- _series_clock_back(at): a series that was thinned up to a time ahead is thinned up to now. Writes series_step.
create or replace function tallybook._series_clock_back(p_at timestamptz) returns void
language sql as $$
  update tallybook.series_step s set thinned_to = p_at where s.thinned_to > p_at and isfinite(s.thinned_to)
$$;
