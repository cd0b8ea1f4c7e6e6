-- n, n groups (id, terms, version, worker, rank, size, record); frame keys: (incoming, final) per group
-- -> {fate, ...} | {'mismatch', id, terms of the request} | {'missing', id} | {'other_content', id, worker}
-- What all groups need is done in one command for all: a call of Redis costs more than most of these changes.
local groups, ids, incoming = {}, {}, {}
for i = 1, count() do
  local group = {
    id = arg(), terms = arg(), version = count(), worker = arg(), rank = count(), size = count(), record = arg(),
    incoming = frame_key(), frame = frame_key(), request = false,
  }
  groups[i], ids[i], incoming[i] = group, group.id, group.incoming
end

local function refuse_all(word, id, detail)
  for _, group in ipairs(groups) do call('UNLINK', group.incoming) end
  return {word, id, detail}
end

local live, settled = hash_values(K.live, ids), {}
for i, id in ipairs(ids) do
  if not live[i] then settled[#settled + 1] = id end
end
local held = {}
for i, record in ipairs(hash_values(K.records, settled)) do held[settled[i]] = record end

-- One lease has one answer. Fields of a record: 6 worker, 11 time of the claim, 15 checksum; older records lack the last
-- one, or hold bytes, which cmsgpack does not read.
local function is_other_content(group)
  local record = held[group.id]
  if not record or record == group.record then return false end
  local is_new, one = pcall(cmsgpack.unpack, record)
  local other = cmsgpack.unpack(group.record)
  return is_new and one[15] and other[15] and one[6] == other[6] and one[11] == other[11]
end

for i, group in ipairs(groups) do
  local request = parse_open(group.id, live[i])
  if request and request.terms ~= group.terms then return refuse_all('mismatch', group.id, request.terms) end
  if is_other_content(group) then return refuse_all('other_content', group.id, group.worker) end
  group.request = request
end
if call('EXISTS', unpack(incoming)) < #groups then
  for _, group in ipairs(groups) do
    if call('EXISTS', group.incoming) == 0 then return refuse_all('missing', group.id, '') end
  end
end

local TABLE = {fresh = 'fresh', reevaluate = 'reevaluated'}
local stored, is_stored = {}, {}

local function admit(group)
  local request = group.request
  if is_stored[group.id] then return 'duplicate' end
  if not request then return call('ZSCORE', K.done, group.id) and 'duplicate' or 'unknown' end
  if group.version < request.min_version then
    requeue(request)
    return 'stale'
  end
  stored[#stored + 1] = group
  is_stored[group.id] = true
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

-- As `settle` does it for one.
local function settle_all(stored_ids)
  local of_purpose, done, assembled = {}, {}, meta('assembled')
  for _, group in ipairs(stored) do
    local purpose = group.request.purpose
    of_purpose[purpose] = of_purpose[purpose] or {}
    table.insert(of_purpose[purpose], group.id)
    done[#done + 1] = settled_at(group.request, assembled)
    done[#done + 1] = group.id
    count_settled(group.request)
  end
  unlease_all(stored_ids)
  for purpose, some in pairs(of_purpose) do
    bulk('ZREM', K['leases_' .. purpose], some)
    bulk('ZREM', K['queue_' .. purpose], some)
    -- The request of a fresh group is needed until its batch: its prompt may enter B_bad, or be asked again.
    if purpose ~= 'fresh' then bulk('HDEL', K.requests, some) end
  end
  bulk('HDEL', K.live, stored_ids)
  bulk('HDEL', K.attempts, stored_ids)
  bulk('ZREM', K.planned, stored_ids)
  bulk('ZADD', K.done, done)
end

local function keep_frames()
  local size, fresh_size = 0, 0
  for _, group in ipairs(stored) do
    call('RENAME', group.incoming, group.frame)
    call('PERSIST', group.frame)
    size = size + group.size
    if group.request.purpose == 'fresh' then fresh_size = fresh_size + group.size end
  end
  call('HINCRBY', K.meta, 'bytes', size)
  call('HINCRBY', K.meta, 'fresh_bytes', fresh_size)
end

local function enter_tables()
  local stored_ids, records, refs, members = {}, {}, {}, {fresh = {}, reevaluated = {}}
  local seq = call('HINCRBY', K.meta, 'seq', #stored) - #stored
  for i, group in ipairs(stored) do
    stored_ids[i] = group.id
    records[2 * i - 1], records[2 * i] = group.id, group.record
    refs[2 * i - 1], refs[2 * i] = group.id, 1
    local ready = members[TABLE[group.request.purpose]]
    if ready then
      ready[#ready + 1] = group.rank * SPAN + seq + i
      ready[#ready + 1] = group.id
    end
  end
  bulk('HSET', K.records, records)
  bulk('HSET', K.refs, refs)
  for name, some in pairs(members) do bulk('ZADD', K[name], some) end
  return stored_ids
end

-- Only of those that have answered something: names that nobody asked anything are not kept.
local function hear_all()
  local heard = {}
  for _, group in ipairs(stored) do
    if not heard[group.worker] then hear(group.worker) end
    heard[group.worker] = true
  end
end

run_even_when_full()
local fates, counts = {}, {}
for i, group in ipairs(groups) do
  fates[i] = admit(group)
  counts[fates[i]] = (counts[fates[i]] or 0) + 1
  if fates[i] ~= 'stored' then call('UNLINK', group.incoming) end
end
if #stored > 0 then
  keep_frames()
  settle_all(enter_tables())
  call('HSET', K.meta, 'failures_in_a_row', 0)
  hear_all()
end
for fate, number in pairs(counts) do call('HINCRBY', K.counters, 'pushed_groups:' .. fate, number) end
return fates
