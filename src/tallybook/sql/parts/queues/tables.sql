-- The scheduled jobs of one queue by time: queue_top and queue_truncate read no other queue.
create index scheduled_of_lane on tallybook.scheduled (lane_id, run_at);

create index waiting_of_lane on tallybook.waiting (lane_id) where fair_key is null;

-- Settings that no job reads.
alter table tallybook.queue add column error_retention interval, add column metrics_retention interval,
  add column own_names boolean not null default false,
  add column random_order boolean not null default false,
  add constraint "errors and metrics are kept 1 minute to 100 years" check (
    error_retention between interval '1 minute' and interval '100 years'
    and metrics_retention between interval '1 minute' and interval '100 years');
comment on column tallybook.queue.error_retention is
  'How long the view error shows its failures; null: as long as the history of its jobs.';
comment on column tallybook.queue.metrics_retention is
  'The least time that its series is kept; then it is deleted instead of summed up to a longer step. Null: as all.';
comment on column tallybook.queue.own_names is
  'Whether its subjects have names of their own, so that another queue can have the same name and task.';
comment on column tallybook.queue.random_order is
  'Whether its new jobs get a random place among those that wait.';
