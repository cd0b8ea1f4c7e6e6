-- n, then n of each: ids, terms, versions, workers, ranks, sizes, records; frame keys: n incoming, n final
-- -> {result, ...} | {'mismatch', id, terms of the request} | {'missing', id, bytes} | {'other_content', id, worker}
-- Workers write frames under `incoming`, where they expire. Frames of stored groups are renamed to keys that no worker
-- may write to, and persist.
-- One command handles all groups, and arguments are columns: a Redis call, or reading a single argument, costs more than
-- most of these changes.
local n = count()
local ids, terms, versions, workers, ranks, sizes, records = args(n), args(n), args(n), args(n), args(n), args(n), args(n)
local incoming, frames = frame_keys(n), frame_keys(n)

local function refuse_all(word, id, detail)
  call('UNLINK', unpack(incoming))
  return {word, id, detail}
end

local live, settled = hash_values(K.live, ids), {}
for i, id in ipairs(ids) do
  if not live[i] then settled[#settled + 1] = id end
end
local held = {}
for i, record in ipairs(hash_values(K.records, settled)) do held[settled[i]] = record end

-- One lease accepts one group. Fields of a record: 6 worker, 11 time of the claim.
local function is_other_content(record, than)
  if not record or record == than then return false end
  local one, other = cmsgpack.unpack(record), cmsgpack.unpack(than)
  return one[6] == other[6] and one[11] == other[11]
end

local requests = {}
for i, id in ipairs(ids) do
  local request = parse_open(id, live[i])
  if request and request.terms ~= terms[i] then return refuse_all('mismatch', id, request.terms) end
  requests[i] = request
  if is_other_content(held[id], records[i]) then return refuse_all('other_content', id, workers[i]) end
end
for i, id in ipairs(ids) do
  local found = call('STRLEN', incoming[i])
  if found ~= tonumber(sizes[i]) then
    call('HINCRBY', K.counters, 'bad_frames:' .. workers[i], 1)
    return refuse_all('missing', id, tostring(found))
  end
end

local TABLE = {fresh = 'fresh', reevaluate = 'reevaluated'}
local stored, is_stored = {}, {}

local function admit(i)
  local id, request = ids[i], requests[i]
  if is_stored[id] then return 'duplicate' end
  if not request then return call('ZSCORE', K.done, id) and 'duplicate' or 'unknown' end
  if tonumber(versions[i]) < request.min_version then
    requeue(request)
    return 'stale'
  end
  stored[#stored + 1] = i
  is_stored[id] = true
  return 'stored'
end

local function unlease_all(stored_ids)
  local held, released = {}, {}
  for i, worker in ipairs(hash_values(K.holders, stored_ids)) do
    if worker then
      held[#held + 1] = stored_ids[i]
      released[worker] = (released[worker] or 0) + 1
    end
  end
  bulk('HDEL', K.holders, held)
  for worker, number in pairs(released) do
    if call('HINCRBY', K.held, worker, -number) <= 0 then call('HDEL', K.held, worker) end
  end
end

-- `settle` in bulk.
local function settle_all(stored_ids)
  local of_purpose, done, assembled = {}, {}, meta('assembled')
  for _, i in ipairs(stored) do
    local request = requests[i]
    local some = of_purpose[request.purpose] or {}
    of_purpose[request.purpose] = some
    some[#some + 1] = request.id
    done[#done + 1] = settled_at(request, assembled)
    done[#done + 1] = request.id
    count_settled(request)
  end
  unlease_all(stored_ids)
  for purpose, some in pairs(of_purpose) do
    bulk('ZREM', K['leases_' .. purpose], some)
    bulk('ZREM', K['queue_' .. purpose], some)
    -- The request of a fresh group is needed until its batch: its prompt may enter B_bad, or be re-sampled.
    if purpose ~= 'fresh' then bulk('HDEL', K.requests, some) end
  end
  bulk('HDEL', K.live, stored_ids)
  bulk('HDEL', K.attempts, stored_ids)
  forget_journals(stored_ids)
  bulk('ZREM', K.planned, stored_ids)
  bulk('ZADD', K.done, done)
end

local function keep_frames()
  local size, fresh_size = 0, 0
  for _, i in ipairs(stored) do
    call('RENAME', incoming[i], frames[i])
    call('PERSIST', frames[i])
    size = size + sizes[i]
    if requests[i].purpose == 'fresh' then fresh_size = fresh_size + sizes[i] end
  end
  call('HINCRBY', K.meta, 'bytes', size)
  call('HINCRBY', K.meta, 'fresh_bytes', fresh_size)
end

local function enter_tables()
  local stored_ids, rows, refs, members = {}, {}, {}, {fresh = {}, reevaluated = {}}
  local seq = call('HINCRBY', K.meta, 'seq', #stored) - #stored
  for place, i in ipairs(stored) do
    local id = ids[i]
    stored_ids[place] = id
    rows[2 * place - 1], rows[2 * place] = id, records[i]
    refs[2 * place - 1], refs[2 * place] = id, FRAME_BYTE * sizes[i] + 1
    local ready = members[TABLE[requests[i].purpose]]
    if ready then
      ready[#ready + 1] = ranks[i] * SPAN + seq + place
      ready[#ready + 1] = id
    end
  end
  bulk('HSET', K.records, rows)
  bulk('HSET', K.refs, refs)
  for name, some in pairs(members) do bulk('ZADD', K[name], some) end
  return stored_ids
end

-- Only workers whose group was stored: unknown names are not kept.
local function hear_all()
  local heard = {}
  for _, i in ipairs(stored) do
    if not heard[workers[i]] then hear(workers[i]) end
    heard[workers[i]] = true
  end
end

run_even_when_full()
local results, counts = {}, {}
for i = 1, n do
  results[i] = admit(i)
  counts[results[i]] = (counts[results[i]] or 0) + 1
end
if #stored > 0 then
  keep_frames()
  settle_all(enter_tables())
  call('HSET', K.meta, 'failures_in_a_row', 0)
  hear_all()
end
call('UNLINK', unpack(incoming))  -- frames of groups that were not stored
for result, number in pairs(counts) do call('HINCRBY', K.counters, 'pushed_groups:' .. result, number) end
return results
