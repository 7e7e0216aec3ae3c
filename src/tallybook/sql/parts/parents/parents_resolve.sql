-- parents_resolve(parents, after, max_parents, at, as_service): start or cancel the jobs whose parents have ended.
--
-- Any worker may run it at any time, also while others do: it reads the ledger, so nothing is missed or done twice.
--   parents      check only these jobs, whose ends the caller has just seen
--   after, max_parents  otherwise: at most this many parents with higher ids than after
--   as_service   claim the run first, and record it (see _service.sql); ended is null if another session runs it, or
--                has run it within the last second
-- A child whose parents have all ended moves to its lane, or to scheduled if its time has not come. A child that needs
-- them completed is cancelled as soon as one of them is not, and so are its own children. Returns ended: the number of
-- ended parents, counted once per child; released and cancelled: numbers of children; busy: children that another
-- session has locked, so call again soon; last: the last parent, null if there are no more; remain: whether any child
-- waits.
-- A session marks a parent as ended only while it locks the child's row in waiting, for which it never waits. The
-- session that marks the last parent therefore sees all other marks in the newer snapshot of its next statement. Needs
-- READ COMMITTED (TB003). Waits at most 20 ms, for a tombstone.
-- Reads parent, entry, outcome, scheduled, dead, tombstone; deletes from waiting, parent; writes parent, entry,
-- scheduled, waiting (children with a fair key), order_line, outcome, tally, tombstone, service.
-- profile: nested
-- rights: worker
create or replace function tallybook.parents_resolve(parents bigint[] default null, after bigint default null,
  max_parents int default 500, at timestamptz default clock_timestamp(), as_service boolean default false,
  out ended int, out released int, out cancelled int, out busy int, out last bigint, out remain boolean)
language plpgsql as $$
declare
  v_ids bigint[]; v_as text[]; v_failures jsonb[]; v_children bigint[]; v_all bigint[]; v_n int; v_id bigint;
  v_timeouts int := 0; v_cancelled bigint[]; v_left bigint[];
begin
  perform tallybook._read_committed('parents_resolve needs READ COMMITTED',
                                    'An older snapshot does not show which jobs have ended.');
  if as_service and (after is null and exists (select from tallybook.service s
                                                where s.name = 'parents_resolve'
                                                      and s.last_run_at between at - interval '0.7 s' and at)
                     or not tallybook._service_claim('parents_resolve', at)) then
    remain := exists (select from tallybook.parent);
    return;
  end if;
  ended := 0; released := 0; cancelled := 0; busy := 0;
  if parents is null then
    parents := array(select distinct p.parent_id from tallybook.parent p
                      where p.ended_as is null and p.parent_id > coalesce(parents_resolve.after, -1)
                            order by p.parent_id limit max_parents);
    if cardinality(parents) = max_parents then last := parents[max_parents]; end if;
  end if;
  loop
    exit when parents = '{}';
    select array_agg(e.job_id), array_agg(e.ended_as), array_agg(e.failure) into v_ids, v_as, v_failures
      from tallybook._ended_as(array(
             select distinct i from unnest(parents) i
              where exists (select from tallybook.parent p where p.parent_id = i and p.ended_as is null))) e
     where e.ended_as is not null;
    exit when v_ids is null;
    v_all := array(select distinct p.child_id from tallybook.parent p where p.parent_id = any (v_ids)
                   and p.ended_as is null);
    v_children := array(select w.job_id from tallybook.waiting w where w.job_id = any (v_all)
                        order by w.job_id for update skip locked);
    busy := busy + cardinality(v_all) - cardinality(v_children);
    delete from tallybook.parent p  -- of children that somebody has deleted by hand
     where p.child_id = any (v_all) and p.child_id <> all (v_children)
       and not exists (select from tallybook.waiting w where w.job_id = p.child_id);
    -- From here on a newer snapshot: all that others have marked for these children is seen.
    -- By the parent, however many parents a child has.
    update tallybook.parent p set ended_as = k.ended_as, failure = k.failure
      from (select o.child_id, o.parent_id, e.ended_as, e.failure
              from unnest(v_ids, v_as, v_failures) e(id, ended_as, failure), lateral (
                select x.child_id, x.parent_id from tallybook.parent x where x.parent_id = e.id
                       and x.ended_as is null offset 0) o
             where o.child_id = any (v_children) offset 0) k
     where p.child_id = k.child_id and p.parent_id = k.parent_id;
    get diagnostics v_n = row_count;
    ended := ended + v_n;

    v_cancelled := '{}'; v_left := '{}';
    for v_id in select w.job_id from tallybook.waiting w
                 where w.job_id = any (v_children) and w.options #>> '{parents,on}' is distinct from 'any'
                   and exists (select from tallybook.parent p where p.child_id = w.job_id and p.failure is not null)
                 order by w.job_id loop
      if v_timeouts < 3 and tallybook._cancel_child(v_id, at) then
        v_cancelled := v_cancelled || v_id;
      else  -- somebody's open transaction cancels it, too: found again by the next look
        v_timeouts := v_timeouts + 1; busy := busy + 1; v_left := v_left || v_id;
      end if;
    end loop;
    update tallybook.parent p set ended_as = null, failure = null where p.child_id = any (v_left)
      and p.parent_id = any (v_ids);
    released := released + tallybook._release_children(v_children, at);
    cancelled := cancelled + cardinality(v_cancelled);

    exit when v_cancelled = '{}';
    parents := v_cancelled;  -- what was cancelled here has ended, and others may wait for it in turn
  end loop;
  remain := exists (select from tallybook.parent);
  if as_service then perform tallybook._service_ran('parents_resolve', at, released + cancelled); end if;
end $$;
