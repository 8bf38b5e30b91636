-- Removes the consumers of an outbox that have been gone for so many ms.
local function forget_consumers(outbox, group, gone)
  for _, fields in ipairs(redis.call('XINFO', 'CONSUMERS', outbox, group)) do
    local info = {}
    for i = 1, #fields, 2 do info[fields[i]] = fields[i + 1] end
    -- DELCONSUMER drops what a consumer still owns: only those that own nothing
    if info.pending == 0 and info.idle > gone then redis.call('XGROUP', 'DELCONSUMER', outbox, group, info.name) end
  end
end
