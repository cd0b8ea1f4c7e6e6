-- number of fresh groups -> {assembled, tables, ids of fresh groups, ids of reevaluated groups, stale fates}
-- Records are not read here: passing values of that size through Lua costs ten times what a plain command costs.
local most = count()
return {
  meta('assembled'),
  call('GET', K.tables) or '',
  most > 0 and call('ZRANGE', K.fresh, 0, most - 1) or {},
  call('ZRANGE', K.reevaluated, 0, -1),
  call('LRANGE', K.stale, 0, -1),
}
