-- round (step or ''), cursor (or ''), spares (or ''), n, n requests -> how many are new
run_even_when_full()
local round, cursor, spares, num_requests = arg(), arg(), arg(), count()
if round ~= '' and call('HEXISTS', K.rounds, round) == 1 then return 0 end
if cursor ~= '' then
  -- A first request beyond the stored cursor was planned on a state that a restore has undone: storing the new cursor
  -- would skip the requests between, and their step would never be assembled.
  if tonumber(cursor) <= meta('cursor') or tonumber(cursor) - num_requests > meta('cursor') then return 0 end
  call('HSET', K.meta, 'cursor', cursor)
  if spares ~= '' then call('HSET', K.meta, 'fresh_spares', spares) end
end
-- An issued round counts every open re-evaluation of its step and is decremented when one finishes.
local function count_late(request)
  local step = string.match(request.terms, '^%S+ (%S+)')
  if request.purpose == 'reevaluate' and call('HEXISTS', K.rounds, step) == 1 then call('HINCRBY', K.rounds, step, 1) end
end

-- Including those enqueued separately before the round was issued.
local function count_open(step)
  local found = 0
  for _, place in ipairs({'queue_reevaluate', 'leases_reevaluate'}) do
    local ids = call('ZRANGE', K[place], 0, -1)
    for i, live in ipairs(hash_values(K.live, ids)) do
      if parse_open(ids[i], live).step == step then found = found + 1 end
    end
  end
  return found
end

local added = 0
for _ = 1, num_requests do
  local request = request_args()
  if enqueue(request, false) == 1 then
    added = added + 1
    count_late(request)
  end
end
if round ~= '' then call('HSET', K.rounds, round, count_open(round)) end
return added
