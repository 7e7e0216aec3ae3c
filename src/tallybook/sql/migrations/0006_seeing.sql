-- 0006: seeing and steering: the record of what people have changed, the nonces of signed requests, lists of jobs. Workers may run.

-- Audit and nonces

-- Lists of jobs
