-- worker, nonce or '', limit, policy version, fresh ones too? (1 | 0) -> {request, attempts, request, attempts, ...}
run_even_when_full()
local worker, nonce, limit, version, with_fresh = arg(), arg(), count(), count(), count() == 1
return_expired_leases()
hear(worker)

local function is_older(claim, than)
  local client, number = string.match(claim, '^(%w+)-(%d+)$')
  local newest_client, newest = string.match(than, '^(%w+)-(%d+)$')
  return client == newest_client and tonumber(number) < tonumber(newest)
end

local function lease(id, purpose)
  call('ZADD', K['leases_' .. purpose], now_ms() + LEASE_MS, id)
end

-- Ids still leased to the worker of a repeated claim; none for an older claim; nil for a new one.
local function leased_before()
  local remembered = call('HGET', K.claims, worker)
  if not remembered or nonce == '' then return nil end
  local newest, ids = string.match(remembered, '^(%S+)(.*)$')
  local held = {}
  if nonce == newest then
    for id in string.gmatch(ids, '%S+') do
      if call('HGET', K.holders, id) == worker then
        lease(id, find_open(id).purpose)
        held[#held + 1] = id
      end
    end
  elseif not is_older(nonce, newest) then
    return nil
  end
  return held
end

local function dequeue()
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
      lease(id, purpose)
      call('HSET', K.holders, id, worker)
      call('HINCRBY', K.held, worker, 1)
      claimed[#claimed + 1] = id
    end
  end
  return claimed
end

local function remember(claimed)
  if nonce == '' then
    call('HDEL', K.claims, worker)
  else
    call('HSET', K.claims, worker, nonce .. ' ' .. table.concat(claimed, ' '))
  end
end

local claimed = leased_before()
if not claimed then
  claimed = dequeue()
  if #claimed > 0 then remember(claimed) end
end
local reply = {}
for _, id in ipairs(claimed) do
  reply[#reply + 1] = call('HGET', K.requests, id)
  reply[#reply + 1] = call('HGET', K.attempts, id) or '0'
end
return reply
