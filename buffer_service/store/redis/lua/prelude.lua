-- Shared by all scripts. Python prepends `local K, NUM_INDEX = {meta = KEYS[1], ...}, n`: the index keys by name.
--
--   QUEUED (queue_P) --claim--> LEASED (leases_P) --settle--> done          P: fresh | reevaluate | evaluate
--      ^                            |
--      +--------- requeue ----------+
--
-- An open request is in `live` and in exactly one of queue_P and leases_P.

local call = redis.call

do
  local state = call('HMGET', K.meta, 'restoring', 'format')
  if state[1] then return redis.error_reply('RESTORING') end
  if state[2] and state[2] ~= FORMAT then return redis.error_reply('FORMAT ' .. state[2]) end
  if not state[2] then call('HSET', K.meta, 'format', FORMAT) end
end

local LEASE_MS, MAX_ATTEMPTS = tonumber(ARGV[1]), tonumber(ARGV[2])
local next_arg, next_key = 3, NUM_INDEX + 1

local function arg()
  next_arg = next_arg + 1
  return ARGV[next_arg - 1]
end

local function count()
  return tonumber(arg())
end

local function frame_key()
  next_key = next_key + 1
  return KEYS[next_key - 1]
end

-- Lua's unpack accepts at most a few thousand values.
local CHUNK = 4000

local function slice(values, first, n)
  if n <= CHUNK then return {unpack(values, first, first + n - 1)} end
  local found = {}
  for i = 1, n do found[i] = values[first + i - 1] end
  return found
end

-- The next n arguments and the next n frame keys, in bulk: reading single ones costs more than using them.
local function args(n)
  next_arg = next_arg + n
  return slice(ARGV, next_arg - n, n)
end

local function list()
  return args(count())
end

local function frame_keys(n)
  next_key = next_key + n
  return slice(KEYS, next_key - n, n)
end

-- Redis refuses the first write of a script when memory is full, and none after it, unless that first write frees
-- memory. Scripts that must run then, because the learner drains the buffer through them or waits for what they do,
-- begin with this one.
local function run_even_when_full()
  call('HDEL', K.meta, '-')
end

local function now_ms()
  local time = call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function meta(name)
  return tonumber(call('HGET', K.meta, name) or 0)
end

local function hash_values(key, ids)
  if #ids > 0 and #ids <= CHUNK then return call('HMGET', key, unpack(ids)) end
  local values = {}
  for first = 1, #ids, CHUNK do
    for _, value in ipairs(call('HMGET', key, unpack(ids, first, math.min(first + CHUNK - 1, #ids)))) do
      values[#values + 1] = value
    end
  end
  return values
end

-- One command with many values, CHUNK at a time; pairs are never cut in two, because CHUNK is even.
local function bulk(command, key, values)
  for first = 1, #values, CHUNK do
    call(command, key, unpack(values, first, math.min(first + CHUNK - 1, #values)))
  end
end

-- A score holds min_version above 32 bits of place, so that one range of a queue is all that a version may answer.
-- Re-evaluations are claimed from the top (newest round first), so their places fall.
local SPAN, MIDDLE = 4294967296, 2147483648
local CLAIM_ORDER = {'reevaluate', 'evaluate', 'fresh'}

local function enqueue(request, at_head)
  if call('HEXISTS', K.live, request.id) == 1 or call('ZSCORE', K.done, request.id) then return 0 end
  -- The request is forgotten, but B_high or a batch contains the group: a new one would replace it there.
  if call('HEXISTS', K.refs, request.id) == 1 then return 0 end
  local seq = call('HINCRBY', K.meta, 'seq', 1)
  if at_head or request.purpose == 'reevaluate' then seq = -seq end
  local score = string.format('%.0f', request.min_version * SPAN + MIDDLE + seq)
  call('HSET', K.live, request.id, score .. ' ' .. request.terms)
  call('HSET', K.requests, request.id, request.blob)
  call('ZADD', K['queue_' .. request.purpose], score, request.id)
  if request.purpose == 'fresh' then call('ZADD', K.planned, string.match(request.terms, '^%S+ (%S+)'), request.id) end
  return 1
end

local function request_args()
  return {purpose = arg(), min_version = tonumber(arg()), id = arg(), terms = arg(), blob = arg()}
end

local function parse_open(id, live)
  if not live then return nil end
  local score, terms, purpose, step, label = string.match(live, '^(%S+) ((%S+) (%S+) %S+ %S+ (%S*))$')
  return {
    id = id, score = score, terms = terms, purpose = purpose, step = step, label = label,
    min_version = math.floor(tonumber(score) / SPAN),
  }
end

local function find_open(id)
  return parse_open(id, call('HGET', K.live, id))
end

local function unlease(request)
  if call('ZREM', K['leases_' .. request.purpose], request.id) == 0 then return end
  local worker = call('HGET', K.holders, request.id)
  call('HDEL', K.holders, request.id)
  if call('HINCRBY', K.held, worker, -1) <= 0 then call('HDEL', K.held, worker) end
end

local function requeue(request)
  unlease(request)
  call('ZADD', K['queue_' .. request.purpose], request.score, request.id)
end

-- The journal of a request's episodes ends with it.
local function forget_journals(ids)
  for i, number in ipairs(hash_values(K.journals, ids)) do
    if number then
      local fields = {ids[i]}
      for n = 0, tonumber(number) - 1 do fields[n + 2] = ids[i] .. ' ' .. n end
      bulk('HDEL', K.journals, fields)
    end
  end
end

-- Requests of an evaluation expire with its label, not after a number of steps.
local function settled_at(request, assembled)
  return request.purpose == 'evaluate' and '+inf' or assembled
end

local function count_settled(request)
  if request.purpose == 'reevaluate' and call('HEXISTS', K.rounds, request.step) == 1 then
    call('HINCRBY', K.rounds, request.step, -1)
  elseif request.purpose == 'evaluate' then
    call('HINCRBY', K.evaluations, request.label, 1)
    call('ZADD', K.evaluated, 0, request.label .. ' ' .. request.id)
  end
end

local function settle(request)
  unlease(request)
  call('ZREM', K['queue_' .. request.purpose], request.id)
  call('HDEL', K.live, request.id)
  call('HDEL', K.attempts, request.id)
  forget_journals({request.id})
  call('ZREM', K.planned, request.id)
  call('ZADD', K.done, settled_at(request, meta('assembled')), request.id)
  count_settled(request)
end

-- Finished without a group. If fresh, the steps are short of one group: the scheduler requests another.
local function drop_open(request, reason)
  settle(request)
  call('HDEL', K.requests, request.id)
  call('HINCRBY', K.counters, 'dropped_requests:' .. reason, 1)
  if request.purpose == 'fresh' then call('HINCRBY', K.meta, 'fresh_dropped', 1) end
end

local function attempt_failed(request, reason)
  if call('HINCRBY', K.attempts, request.id, 1) < MAX_ATTEMPTS then
    requeue(request)
    return 'requeued'
  end
  drop_open(request, reason)
  return 'dropped'
end

local function return_expired_leases()
  local now = now_ms()
  for _, purpose in ipairs(CLAIM_ORDER) do
    local ids = call('ZRANGEBYSCORE', K['leases_' .. purpose], '-inf', now, 'LIMIT', 0, 1000)
    for _, id in ipairs(ids) do attempt_failed(find_open(id), 'lease_over') end
  end
end

-- Record that a worker is alive, and forget a few workers (and their claims) that hold no lease and were silent for
-- SILENT_MS. Those with leases are checked again when these expire.
local SILENT_MS, FORGOTTEN_AT_ONCE = 3600000, 8

local function hear(worker)
  local now = now_ms()
  call('ZADD', K.heard, now, worker)
  for _, silent in ipairs(call('ZRANGEBYSCORE', K.heard, '-inf', now - SILENT_MS, 'LIMIT', 0, FORGOTTEN_AT_ONCE)) do
    if call('HEXISTS', K.held, silent) == 0 then
      call('ZREM', K.heard, silent)
      call('HDEL', K.claims, silent)
    end
  end
end

-- A group's value in `refs`: its reference count, and in the upper bits the bytes of its frame, so that deleting it does
-- not read the frame.
local FRAME_BYTE = 1048576

-- Delete unreferenced groups and subtract the bytes of their frames.
local function delete_groups(ids, frames, size)
  if #ids == 0 then return end
  for first = 1, #frames, CHUNK do call('UNLINK', unpack(frames, first, math.min(first + CHUNK - 1, #frames))) end
  bulk('HDEL', K.refs, ids)
  bulk('HDEL', K.records, ids)
  bulk('HDEL', K.bad_frames, ids)
  -- 0 - n, because Lua writes -0 as "-0", which is no integer to Redis.
  call('HINCRBY', K.meta, 'bytes', 0 - size)
end

-- Change the reference counts of distinct groups, in bulk (one by one costs three times as much). Frames may be left out
-- when nothing can be deleted.
local function refer(ids, change, frames)
  local kept, gone, gone_frames, size, k, g = {}, {}, {}, 0, 0, 0
  for i, value in ipairs(hash_values(K.refs, ids)) do
    local number = tonumber(value or 0)
    if number % FRAME_BYTE + change > 0 then
      kept[k + 1], kept[k + 2] = ids[i], number + change
      k = k + 2
    else
      g = g + 1
      gone[g], gone_frames[g] = ids[i], frames[i]
      size = size + math.floor(number / FRAME_BYTE)
    end
  end
  bulk('HSET', K.refs, kept)
  delete_groups(gone, gone_frames, size)
end
