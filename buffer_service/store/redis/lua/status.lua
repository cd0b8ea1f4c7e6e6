-- number of compositions -> {meta, queued and leased by purpose, sizes, evaluations, rounds, workers, held, tables, lines}
if call('ZCARD', K.leases_fresh) + call('ZCARD', K.leases_reevaluate) + call('ZCARD', K.leases_evaluate) > 0 then
  run_even_when_full()
  return_expired_leases()
end
local requests = {}
for _, purpose in ipairs(CLAIM_ORDER) do
  requests[#requests + 1] = purpose
  requests[#requests + 1] = call('ZCARD', K['queue_' .. purpose])
  requests[#requests + 1] = call('ZCARD', K['leases_' .. purpose])
end
return {
  call('HGETALL', K.meta),
  requests,
  {call('ZCARD', K.fresh), call('ZCARD', K.reevaluated)},
  call('HGETALL', K.evaluations),
  call('HGETALL', K.rounds),
  call('ZRANGE', K.heard, 0, -1, 'WITHSCORES'),
  call('HGETALL', K.held),
  call('GET', K.tables) or '',
  call('LRANGE', K.compositions, 0, count() - 1),
  now_ms(),
}
