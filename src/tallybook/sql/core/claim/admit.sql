-- admit(leases, job_ids, attempts, blocked_by, ...): decide whether claimed jobs may start. Pass the jobs for which
-- claimed_jobs returned blocked_by. Returns a row with a verdict for each job that the caller still holds:
--
--   start    start the job in starts_in seconds, at most late seconds after that (null: without this limit)
--   wait     call admit again soon; said: what the job waits for, as in blocked_by
--   ended    this attempt has ended; said: the job's state now (cancelled, dead, scheduled, available, waiting), or
--            refused if the lease no longer holds it. If an order key decided, said is always waiting. If a limit
--            decided, said is scheduled or cancelled, even if the job waits for a permit or the lease was lost
--   unknown  said names a limit that has no rule; the job is unchanged
-- permits: the job holds permits of a concurrency limit; when it has ended, call concurrency_release() with the limits'
-- names. args, options: the job's current values; null if known was passed. A job without a row now belongs to another
-- worker.
--   known    the blocked_by that claimed_jobs returned a moment ago; null: read it again
--   patient  false: also set aside a job that would have to wait for its order key, so that it holds no slot; rescue
--            releases it if nothing else does. Pass it after a while
--   ahead, missed  see limit_take
-- Needs READ COMMITTED (TB003). Locks and writes: see order_admit and limit_take, and the verbs that end attempts.
-- profile: hot
-- rights: worker
create or replace function tallybook.admit(leases uuid[], job_ids bigint[], attempts int[], known text[] default null,
  patient boolean default true, ahead interval default '0', missed boolean default false,
  at timestamptz default clock_timestamp())
returns table (job_id bigint, verdict text, said text, starts_in double precision, late double precision,
               permits boolean, args jsonb, options jsonb) language plpgsql as $$
declare
  c record; v_args jsonb[] := '{}'; v_options jsonb[] := '{}'; v_order int[] := '{}'; v_limit int[] := '{}'; i int;
  v_ready bigint[]; v_busy bigint[]; v_limits boolean := tallybook._has_limits();
begin
  permits := false;
  for i in 1..coalesce(cardinality(job_ids), 0) loop
    job_id := job_ids[i]; verdict := 'ended'; said := known[i]; starts_in := null;
    if known is null then
      select k.blocked_by, k.args, k.options into c from tallybook.claimed_jobs(leases[i], job_ids[i], admit.at) k
       where k.attempt = attempts[i];
      continue when not found;
      said := c.blocked_by; v_args[i] := c.args; v_options[i] := c.options;
    end if;
    if said = 'order_key' then v_order := v_order || i; continue;
    elsif said = 'limit' then v_limit := v_limit || i; continue;
    elsif said = 'cancelled' then said := tallybook.cancel_running(leases[i], job_ids[i], attempts[i], at => admit.at);
    elsif said = 'expired' then said := tallybook.expire(leases[i], job_ids[i], attempts[i], admit.at);
    elsif said = 'postponed' then said := tallybook.postpone(leases[i], job_ids[i], attempts[i], admit.at);
    elsif said = 'changing' then verdict := 'wait';
    else verdict := 'start'; starts_in := 0;
    end if;
    args := v_args[i]; options := v_options[i];
    return next;
  end loop;

  if v_order <> '{}' then
    select o.ready, o.busy into v_ready, v_busy
      from tallybook.order_admit(array(select leases[n] from unnest(v_order) n),
                                 array(select job_ids[n] from unnest(v_order) n),
                                 array(select attempts[n] from unnest(v_order) n), patient, admit.at) o;
    foreach i in array v_order loop
      job_id := job_ids[i];
      if job_id = any (v_ready) and v_limits then v_limit := v_limit || i; continue; end if;
      verdict := case when job_id = any (v_ready) then 'start' when job_id = any (v_busy) then 'wait' else 'ended' end;
      said := case verdict when 'wait' then 'order_key' when 'ended' then 'waiting' end;
      starts_in := case verdict when 'start' then 0 end;
      args := v_args[i]; options := v_options[i];
      return next;
    end loop;
  end if;

  for c in select n, t.* from unnest(v_limit) n
             left join tallybook.limit_take(array(select leases[n] from unnest(v_limit) n),
                                            array(select job_ids[n] from unnest(v_limit) n),
                                            array(select attempts[n] from unnest(v_limit) n),
                                            ahead => admit.ahead, missed => admit.missed, at => admit.at) t
                                            on t.job_id = job_ids[n]
            where v_limit <> '{}' loop
    job_id := job_ids[c.n]; starts_in := c.starts_in; late := c.late; permits := coalesce(c.permits, false);
    verdict := case when c.unknown is not null then 'unknown' when c.starts_in is null then 'ended' else 'start' end;
    said := coalesce(c.unknown, case when c.job_id is null then 'scheduled' when c.starts_in is null
                     then 'cancelled' end); args := v_args[c.n]; options := v_options[c.n];
    return next;
  end loop;
end $$;
