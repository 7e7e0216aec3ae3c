-- The shop's own table and function, the same on every node.
create table orders (
  tenant int, number int, item text not null, confirmed int not null default 0,
  primary key (tenant, number)
);

-- place_order(tenant, number, item): write an order and its job in one transaction. Returns the job's id, or null if
-- the order exists already: a shop whose connection broke at COMMIT can call it again.
create function place_order(p_tenant int, p_number int, p_item text) returns bigint language plpgsql as $$
begin
  insert into orders (tenant, number, item) values (p_tenant, p_number, p_item) on conflict do nothing;
  if not found then return null; end if;
  return tallybook.enqueue('mail', 'confirm', jsonb_build_object('tenant', p_tenant, 'number', p_number));
end $$;
