-- Decides what a model without sequences is told of a request that names one; it is the same until none has come for five minutes.
-- KEYS: its number, as text. ARGV: partition's prefix, whether Redis may lose, name of the sequence, bits of the numbers that the model is
--   told (0 = it takes text).
-- Returns {whether the tenant is another than the model's first one, the number (0 = none)}.
begin(ARGV[1], ARGV[2])
make_room()
local name, bits = ARGV[3], tonumber(ARGV[4])
local held = redis.pcall('GET', KEYS[1])
local other, number = tell_apart(name, type(held) == 'string' and tonumber(held) or 0, bits, TOMBSTONE_MS)
if number > 0 then redis.call('SET', KEYS[1], string.format('%.0f', number), 'PX', TOMBSTONE_MS) end
return {other and 1 or 0, number}
