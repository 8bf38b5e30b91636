-- Moves the entries that `consumer` still owns to the end of another lane, as never delivered.
-- KEYS: lane, other lane, records of the first entries' requests, which may not exist. ARGV: group, consumer, the other
--   lane's name, ids. Returns how many.
local lane, other, group, consumer, name = KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]
local count = 0

redis.call('XACK', lane, group, '0-0') -- for full memory
for i = 4, #ARGV do
  local id, record = ARGV[i], KEYS[i - 1]
  local is_owner = held(lane, group, consumer, id) ~= nil
  local entry = is_owner and redis.call('XRANGE', lane, id, id)[1]
  if entry then
    local fields, origin = {}, id
    for f = 1, #entry[2], 2 do
      if entry[2][f] == 'o' then
        origin = entry[2][f + 1]
      else
        fields[#fields + 1] = entry[2][f]
        fields[#fields + 1] = entry[2][f + 1]
      end
    end
    fields[#fields + 1] = 'o'
    fields[#fields + 1] = origin
    local moved = redis.call('XADD', other, '*', unpack(fields))
    if record and redis.call('EXISTS', record) == 1 then
      redis.call('HSET', record, 'lane', name, 'entry', moved)
    end
    redis.call('XDEL', lane, id)
    count = count + 1
  end
  if is_owner then
    redis.call('XACK', lane, group, id)
    ended(lane, id)
  end
end
return count
