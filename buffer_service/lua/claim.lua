-- worker, limit, policy version, fresh ones too? (1 | 0) -> {request, attempts, request, attempts, ...}
run_even_when_full()
local worker, limit, version, with_fresh = arg(), count(), count(), count() == 1
return_expired_leases()
call('HSET', K.workers, worker, now_ms())
local above = '(' .. string.format('%.0f', (version + 1) * SPAN)
local claimed = {}
for _, purpose in ipairs(CLAIM_ORDER) do
  local left = limit - #claimed
  if left <= 0 or (purpose == 'fresh' and not with_fresh) then break end
  local queue, ids = K['queue_' .. purpose], nil
  if purpose == 'reevaluate' then
    ids = call('ZREVRANGEBYSCORE', queue, above, '-inf', 'LIMIT', 0, left)
  else
    ids = call('ZRANGEBYSCORE', queue, '-inf', above, 'LIMIT', 0, left)
  end
  for _, id in ipairs(ids) do
    call('ZREM', queue, id)
    call('ZADD', K['leases_' .. purpose], now_ms() + LEASE_MS, id)
    call('HSET', K.holders, id, worker)
    call('HINCRBY', K.held, worker, 1)
    claimed[#claimed + 1] = id
  end
end
local reply = {}
for _, id in ipairs(claimed) do
  reply[#reply + 1] = call('HGET', K.requests, id)
  reply[#reply + 1] = call('HGET', K.attempts, id) or '0'
end
return reply
