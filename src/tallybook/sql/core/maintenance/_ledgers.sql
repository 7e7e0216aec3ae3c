-- _ledgers(code): give a retention class its partitions in the three ledgers, if it has none. Brief and long get theirs
-- with their first queue: sessions do not plan for partitions that nobody uses.
--
-- Within a class, partitions go by range of transaction ids, so that old history is dropped in one step. There is
-- always a last range up to MAXVALUE: a producer never meets a missing partition. Prune cuts the range that is in use.
-- Neither producers nor workers wait for this. Two sessions that create the same class run one after the other.
create or replace function tallybook._ledgers(p_code "char") returns void
language plpgsql as $$
declare
  v_class text := case p_code when 'b' then 'brief' when 'l' then 'long' else 'default' end; v_table text; v_all text;
begin
  if to_regclass('tallybook.outcome_' || v_class) is not null then return; end if;
  lock table only tallybook.entry in share update exclusive mode;
  if to_regclass('tallybook.outcome_' || v_class) is not null then return; end if;
  foreach v_table in array array['entry', 'claim', 'outcome'] loop
    v_all := v_table || '_' || v_class;
    execute format('create table tallybook.%I (like tallybook.%I including all) partition by range (%I)', v_all,
      v_table, case v_table when 'outcome' then 'entry_xid' else 'xid' end);
    if v_table = 'outcome' then  -- on the class: the root's key would have to carry the class in each entry
      execute format('create unique index %I on tallybook.%I (entry_xid, entry_seq) with (fillfactor = 100)',
        'an attempt of ' || v_class || ' ends once', v_all);
    end if;
    execute format('create table tallybook.%I partition of tallybook.%I for values from (minvalue) to (maxvalue)',
      v_all || '_1', v_all);
    execute format('alter table tallybook.%I replica identity full', v_all);
    execute format('alter table tallybook.%I replica identity full', v_all || '_1');
    execute format('alter table tallybook.%I attach partition tallybook.%I for values in (%L)', v_table, v_all, p_code);
  end loop;
end $$;
