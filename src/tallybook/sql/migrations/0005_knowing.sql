-- 0005: knowing: counters, history, queues as things, why and trace. Workers may run; the tables that get a trigger are locked for a moment.

-- Counters

-- History

-- Queues

-- Why and trace
