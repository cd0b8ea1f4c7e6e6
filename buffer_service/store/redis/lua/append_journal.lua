-- worker, request id, number of the first entry, n, then n entries -> {'ok'} | {'not_held'} | {'gap', entries that are there}
-- Only the holder of the request writes, and only what follows: an append that was lost on the way may be repeated.
local worker, id, first, entries = arg(), arg(), count(), list()
hear(worker)
if call('HGET', K.holders, id) ~= worker then return {'not_held'} end
local number = tonumber(call('HGET', K.journals, id) or 0)

local function are_there()
  if number ~= first + #entries then return false end
  for i, entry in ipairs(entries) do
    if call('HGET', K.journals, id .. ' ' .. (first + i - 1)) ~= entry then return false end
  end
  return true
end

if number == first then
  local fields = {id, first + #entries}
  for i, entry in ipairs(entries) do
    fields[#fields + 1] = id .. ' ' .. (first + i - 1)
    fields[#fields + 1] = entry
  end
  bulk('HSET', K.journals, fields)
  return {'ok'}
end
if are_there() then return {'ok'} end
return {'gap', number}
