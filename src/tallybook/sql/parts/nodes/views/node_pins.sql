-- node_pins: keys whose jobs go to this node instead of the one that the hash chooses.
--> Keys whose jobs go to this node instead of the one that the hash chooses.
-- rights: producer, worker, operator, reader
create or replace view tallybook.node_pins as
select p.key, p.node, p.pinned_at from tallybook.node_pin p;
