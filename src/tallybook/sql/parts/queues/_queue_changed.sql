-- _queue_changed(queue, change, by): publish a change of a queue's settings on the channel tallybook_queues, at the
-- commit.
--
-- One JSON object: queue, change (created, changed, paused, resumed, truncated, dropped), by, and the present settings.
-- "set tallybook.notify = off" switches it off, as for _wake. Reads queue.
create or replace function tallybook._queue_changed(p_queue text, p_change text, p_by text) returns void
language plpgsql as $$
begin
  if current_setting('tallybook.notify', true) = 'off' then return; end if;
  perform pg_notify('tallybook_queues', (
    select jsonb_build_object('queue', p_queue, 'change', p_change, 'by', left(p_by, 500)) || coalesce((
      select jsonb_build_object('retention', q.retention, 'max_attempts', q.max_attempts, 'notify', q.notify, 'paused',
                                q.paused_at is not null,
                                'error_retention', extract(epoch from q.error_retention),
                                'metrics_retention', extract(epoch from q.metrics_retention),
                                'own_names', q.own_names, 'random_order', q.random_order)
        from tallybook.queue q where q.name = p_queue), '{}'))::text);
end $$;
