-- Lists dead letters, one at a time because they may be large.
-- KEYS: letters. ARGV: first id ('(' = behind it), count, fields to leave out. Returns {id, fields} of each.
local start, count = ARGV[1], tonumber(ARGV[2])
local left_out = {}
for i = 3, #ARGV do left_out[ARGV[i]] = true end
local found = {}

while #found < count do
  local entry = redis.call('XRANGE', KEYS[1], start, '+', 'COUNT', 1)[1]
  if not entry then return found end
  local fields = {}
  for f = 1, #entry[2], 2 do
    if not left_out[entry[2][f]] then
      fields[#fields + 1] = entry[2][f]
      fields[#fields + 1] = entry[2][f + 1]
    end
  end
  found[#found + 1] = {entry[1], fields}
  start = '(' .. entry[1]
end
return found
