-- Partitions of the ledgers: by retention class, then by range of transaction ids, so that old history is dropped in
-- one step. There is always a last range up to MAXVALUE: a producer never meets a missing partition. Prune cuts the
-- range that is in use.
do $$
declare v_table text; v_class text; v_all text; v_first text;
begin
  foreach v_table in array array['entry', 'claim', 'outcome'] loop
    foreach v_class in array array['brief', 'default', 'long'] loop
      v_all := v_table || '_' || v_class; v_first := v_all || '_1';
      execute format('create table tallybook.%I partition of tallybook.%I for values in (%L) partition by range (%I)',
        v_all, v_table, left(v_class, 1), case v_table when 'outcome' then 'entry_xid' else 'xid' end);
      if v_table = 'outcome' then  -- on the class: the root's key would have to carry the class in each entry
        execute format('create unique index %I on tallybook.%I (entry_xid, entry_seq) with (fillfactor = 100)',
          'an attempt of ' || v_class || ' ends once', v_all);
      end if;
      execute format('create table tallybook.%I partition of tallybook.%I for values from (minvalue) to (maxvalue)',
        v_first, v_all);
      execute format('alter table tallybook.%I replica identity full', v_all);
      execute format('alter table tallybook.%I replica identity full', v_first);
    end loop;
  end loop;
end $$;
