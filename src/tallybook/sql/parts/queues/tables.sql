-- Of one queue, in the order of their time: who tops or truncates a queue reads nothing of others.
create index scheduled_of_lane on tallybook.scheduled (lane_id, run_at);

create index waiting_of_lane on tallybook.waiting (lane_id) where fair_key is null;

-- Settings that no job meets.
alter table tallybook.queue add column error_retention interval, add column metrics_retention interval,
  add column own_names boolean not null default false,
  add constraint "errors and metrics are kept 1 minute to 100 years" check (
    error_retention between interval '1 minute' and interval '100 years'
    and metrics_retention between interval '1 minute' and interval '100 years');
comment on column tallybook.queue.error_retention is
  'How long the view error shows its failures; null: as long as the history of the jobs.';
comment on column tallybook.queue.metrics_retention is
  'How long at least its series is kept: after that it is dropped instead of summed up to a longer step; null: not so.';
comment on column tallybook.queue.own_names is
  'Whether the names of its subjects are its own, so that another queue can have a subject of the same name and task.';
