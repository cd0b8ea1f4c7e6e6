-- round (step or ''), cursor (or ''), n, n requests -> how many are new
local round, cursor = arg(), arg()
if round ~= '' and call('HEXISTS', K.rounds, round) == 1 then return 0 end
if cursor ~= '' then
  if tonumber(cursor) <= meta('cursor') then return 0 end
  call('HSET', K.meta, 'cursor', cursor)
end
local added = 0
for _ = 1, count() do added = added + enqueue(request_args(), false) end
if round ~= '' then call('HSET', K.rounds, round, added) end
return added
