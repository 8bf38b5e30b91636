-- Chooses the id of a sequence for a model without sequences; it lasts until five minutes pass without a request.
-- KEYS: its number, as text. ARGV: prefix, is_fragile, name, bits (0 = text). Returns {is_other, number (0 = none)}.
begin(ARGV[1], ARGV[2])
make_room()
local name, bits = ARGV[3], tonumber(ARGV[4])
local held = redis.pcall('GET', KEYS[1])
local other, number = tell_apart(name, type(held) == 'string' and tonumber(held) or 0, bits, TOMBSTONE_MS)
if number > 0 then redis.call('SET', KEYS[1], string.format('%.0f', number), 'PX', TOMBSTONE_MS) end
return {other and 1 or 0, number}
