-- step, latest moment in ms -> 0 | the step of a batch that is missing
run_even_when_full()
local step = count()
if now_ms() > count() then return redis.error_reply('LATE: it was given up') end
local assembled = meta('assembled')
if assembled < step then return assembled + 1 end
for later = step + 1, assembled do
  if call('HEXISTS', K.batches, later) == 0 then return later end
end
for _, id in ipairs(call('HKEYS', K.holders)) do requeue(find_open(id)) end
call('DEL', K.claims)
call('HSET', K.meta, 'step', step, 'policy_version', math.min(step, meta('policy_version')))
call('HSET', K.meta, 'committed', step, 'failures_in_a_row', 0)
return 0
