-- request id -> its entries, in order
local id, entries = arg(), {}
for n = 0, tonumber(call('HGET', K.journals, id) or 0) - 1 do entries[n + 1] = call('HGET', K.journals, id .. ' ' .. n) end
return entries
