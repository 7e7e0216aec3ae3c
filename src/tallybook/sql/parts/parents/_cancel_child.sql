-- _cancel_child(child, at): cancel a waiting job whose parent did not complete. Returns false if another open
-- transaction cancels it, too. The caller has locked its row. A person can retry it.
create or replace function tallybook._cancel_child(p_child bigint, p_at timestamptz) returns boolean
language plpgsql as $$
begin
  return tallybook._cancel_aside(array[p_child], (
    select jsonb_build_object('message', format('its parent %s (%s) is %s%s', p.failure ->> 'job',
             coalesce(p.failure ->> 'task', 'unknown'), p.failure ->> 'state',
             coalesce(': ' || coalesce(p.failure ->> 'message', p.failure ->> 'reason'), '')))
      from tallybook.parent p where p.child_id = p_child and p.failure is not null order by p.place limit 1), p_at) = 1;
exception when lock_not_available then
  return false;
end $$;
