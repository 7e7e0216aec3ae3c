-- 0004: the outside world: providers and routes, webhooks' endpoints, parents, limits. Workers may run; no table of theirs is locked.

-- Providers and routes

-- Webhooks

-- Parents

-- Limits
