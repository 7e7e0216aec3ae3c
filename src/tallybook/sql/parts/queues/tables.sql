-- Of one queue, in the order of their time: who tops or truncates a queue reads nothing of others.
create index scheduled_of_lane on tallybook.scheduled (lane_id, run_at);

create index waiting_of_lane on tallybook.waiting (lane_id) where fair_key is null;
