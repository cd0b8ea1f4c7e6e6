-- label, n, n group ids; one frame key per group -> number of its groups that arrived meanwhile and remain
run_even_when_full()
local label = arg()

-- Rare, and evaluations are small: every open evaluation request is read.
local function forget_open(key, first, last)
  for _, id in ipairs(call('ZRANGE', key, first, last)) do
    local request = find_open(id)
    if request.label == label then
      settle(request)
      call('HDEL', K.requests, id)
      call('ZREM', K.done, id)
      call('ZREM', K.evaluated, label .. ' ' .. id)
    end
  end
end

local gone, frames = {}, {}
forget_open(K.queue_evaluate, 0, -1)
forget_open(K.leases_evaluate, 0, -1)
for _ = 1, count() do
  local id, frame = arg(), frame_key()
  if call('ZREM', K.evaluated, label .. ' ' .. id) == 1 then
    call('ZREM', K.done, id)
    -- A dropped request is finished and has no group.
    if call('HEXISTS', K.refs, id) == 1 then
      gone[#gone + 1] = id
      frames[#gone] = frame
    end
  end
end
refer(gone, -1, frames)
local left = call('ZLEXCOUNT', K.evaluated, '[' .. label .. ' ', '(' .. label .. '!')
if left == 0 then
  call('HDEL', K.evaluations, label)
else
  call('HSET', K.evaluations, label, left)
end
return left
