-- worker, request id, reason, detail -> requeued | dropped | not_leased
run_even_when_full()
local worker, id, reason, text = arg(), arg(), arg(), arg()
hear(worker)
if call('HGET', K.holders, id) ~= worker then return 'not_leased' end
call('HINCRBY', K.meta, 'failures_in_a_row', 1)
call('HSET', K.meta, 'last_failure', text)
call('HINCRBY', K.counters, 'failed_groups:' .. reason, 1)
forget_journals({id})  -- the next attempt begins all episodes anew
return attempt_failed(find_open(id), reason)
