-- round (step or ''), cursor (or ''), spares (or ''), n, n requests -> how many are new
run_even_when_full()
local round, cursor, spares = arg(), arg(), arg()
if round ~= '' and call('HEXISTS', K.rounds, round) == 1 then return 0 end
if cursor ~= '' then
  if tonumber(cursor) <= meta('cursor') then return 0 end
  call('HSET', K.meta, 'cursor', cursor)
  if spares ~= '' then call('HSET', K.meta, 'fresh_spares', spares) end
end
local added = 0
for _ = 1, count() do added = added + enqueue(request_args(), false) end
if round ~= '' then call('HSET', K.rounds, round, added) end
return added
