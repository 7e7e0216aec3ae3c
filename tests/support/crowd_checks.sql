-- What the crowd must not leave behind (see crowd.py): each query gives one line of text for each finding.

-- name: lost
select format('job %s: %s', l.job_id,
         coalesce((select string_agg(j.state, ',') from tallybook.job j where j.id = l.job_id), 'gone'))
  from ledger_check l
 where not exists (select from tallybook.entry e join tallybook.outcome o on o.entry_xid = e.xid and o.entry_seq = e.seq
                    where e.job_id = l.job_id and o.state in ('completed', 'cancelled'))
   and not exists (select from tallybook.dead d where d.job_id = l.job_id);

-- name: ended more than once
-- A dead letter that is cancelled ends as one more attempt, put and ended in one statement: that was one end.
select format('job %s: %s', e.job_id, string_agg(o.state::text, ','))
  from tallybook.entry e join tallybook.outcome o on o.entry_xid = e.xid and o.entry_seq = e.seq
 where o.state in ('completed', 'cancelled')
    or o.state = 'dead' and not exists (
      select from tallybook.entry e2 join tallybook.outcome o2 on o2.entry_xid = e2.xid and o2.entry_seq = e2.seq
       where e2.job_id = e.job_id and e2.attempt = e.attempt + 1 and o2.state = 'cancelled' and o2.xmin = e2.xmin)
    or o.state = 'lost' and exists (select from tallybook.dead d where d.job_id = e.job_id and d.attempt = e.attempt)
 group by e.job_id having count(*) > 1;

-- name: dead, with no attempt that ended so
select format('job %s', d.job_id) from tallybook.dead d
 where not exists (select from tallybook.entry e join tallybook.outcome o on o.entry_xid = e.xid and o.entry_seq = e.seq
                    where e.job_id = d.job_id and e.attempt = d.attempt and o.state in ('dead', 'lost'));

-- name: run, but rolled back
select format('job %s', r.job_id) from runs r where not exists (select from ledger_check l where l.job_id = r.job_id);

-- name: kept, but rolled back
select format('job %s in %s', k.job_id, k.place)
  from (select job_id, 'entry' as place from tallybook.entry
        union all select job_id, 'scheduled' from tallybook.scheduled
        union all select job_id, 'unique_key' from tallybook.unique_key
        union all select job_id, 'dead' from tallybook.dead) k
 where not exists (select from ledger_check l where l.job_id = k.job_id);

-- name: an attempt run under two leases
select format('job %s attempt %s', job_id, attempt) from runs group by job_id, attempt having count(distinct lease) > 1;

-- name: an attempt ended by two leases
select format('job %s attempt %s', job_id, attempt) from ends group by job_id, attempt having count(distinct lease) > 1;

-- name: an end that was accepted and is not on record
select format('job %s attempt %s', r.job_id, r.attempt) from ends r
 where not exists (select from tallybook.entry e join tallybook.outcome o on o.entry_xid = e.xid and o.entry_seq = e.seq
                    where e.job_id = r.job_id and e.attempt = r.attempt and o.state <> 'lost');

-- name: an attempt without outcome
select format('job %s attempt %s', e.job_id, e.attempt) from tallybook.entry e
 where not exists (select from tallybook.outcome o where o.entry_xid = e.xid and o.entry_seq = e.seq);

-- name: an attempt with two outcomes
select format('job %s attempt %s: %s', e.job_id, e.attempt, string_agg(o.state::text, ','))
  from tallybook.entry e join tallybook.outcome o on o.entry_xid = e.xid and o.entry_seq = e.seq
 group by e.job_id, e.attempt, e.xid, e.seq having count(*) > 1;

-- name: an outcome without attempt
select format('entry (%s, %s)', o.entry_xid, o.entry_seq) from tallybook.outcome o
 where not exists (select from tallybook.entry e where e.xid = o.entry_xid and e.seq = o.entry_seq);

-- name: attempts with a gap, or one twice
select format('job %s: %s', job_id, array_agg(attempt order by attempt)) from tallybook.entry
 group by job_id having count(*) <> max(attempt) or count(distinct attempt) <> count(*);

-- name: a claimed total that is off
select format('lane %s: %s, its claims: %s', c.lane_id, c.claimed, s.jobs)
  from (select distinct on (lane_id) lane_id, claimed from tallybook.claim order by lane_id, number desc) c
  join (select lane_id, sum(jobs) as jobs from tallybook.claim group by lane_id) s using (lane_id)
 where c.claimed <> s.jobs;

-- name: a claim number twice
select format('lane %s number %s', lane_id, number) from tallybook.claim group by lane_id, number having count(*) > 1;

-- name: claims that took more or less than the entries that name them
select format('claims say %s, entries %s', c.jobs, e.jobs)
  from (select coalesce(sum(jobs), 0) as jobs from tallybook.claim) c,
       (select count(*) as jobs
          from tallybook.entry x, lateral tallybook._claim_of(x.lane_id, x.retention, x.xid, x.seq)) e
 where c.jobs <> e.jobs;

-- name: on view other than once, as ended
select format('job %s: %s', coalesce(l.job_id, j.id), coalesce(string_agg(j.state, ','), 'not on view'))
  from ledger_check l full join tallybook.job j on j.id = l.job_id
 group by coalesce(l.job_id, j.id), l.job_id
having count(j.id) <> 1 or l.job_id is null or not bool_and(j.state in ('completed', 'cancelled', 'dead'));
