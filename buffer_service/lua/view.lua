-- number of fresh groups -> {assembled, tables, fresh records, their requests, reevaluated records, stale fates}
local most = count()
local fresh = most > 0 and call('ZRANGE', K.fresh, 0, most - 1) or {}
return {
  meta('assembled'),
  call('GET', K.tables) or '',
  hash_values(K.records, fresh),
  hash_values(K.requests, fresh),
  hash_values(K.records, call('ZRANGE', K.reevaluated, 0, -1)),
  call('LRANGE', K.stale, 0, -1),
}
