-- A model is told other correlation ids than those of tenants that are not its first one: this finds out for which sequences, and allots
-- numbers in place of numbers, which no two sequences have at a time. Needs record.lua.
-- The numbers lie in the upper half of those below 2^53, or below 2^31 where the model takes 32 bits: they are exact as doubles, too, and
-- the first tenant hardly ever has them. Where it does, it reserves its own, and gets another one if that is taken.
--   sequence-numbers       hash: `first` → the first tenant, `last` → how many numbers were allotted
--   sequence-number:<n>    string: the name of the sequence that has the number; lives as long as its record

-- Runs a command on the hash; one that is damaged begins again.
local function on_numbers(command, ...)
  local key = prefix .. 'sequence-numbers'
  local reply = redis.pcall(command, key, ...)
  if type(reply) ~= 'table' then return reply end
  redis.call('UNLINK', key)
  return redis.call(command, key, ...)
end

-- Tells whether a tenant is another one than the first, which the first to come is for ever. Callers without a key are no tenant.
local function is_other(tenant)
  if tenant == '' then return false end
  local first = on_numbers('HGET', 'first')
  if not first then on_numbers('HSET', 'first', tenant) end
  return first and first ~= tenant
end

-- Returns the low bits of a number in decimal digits, as a model is told it; of 64 bits they are exact where they matter, below 2^53.
local function low_bits(digits, bits)
  if bits == 64 then return tonumber(digits) end
  local value = 0
  for digit in string.gmatch(digits, '%d') do value = (value * 10 + tonumber(digit)) % 2 ^ 32 end
  return value
end

-- Decides what the model is told of a sequence, that of `name`, which has the number `held` so far (0 = none). `bits`: of the numbers that it
-- takes (0 = it takes text). The number is reserved for so many ms. Returns whether the tenant is another one, and the number (0 = none).
local function tell_apart(name, held, bits, ms)
  local other, digits = is_other(tenant_of(name)), string.match(name, '^[^:]+:n(%d+)$')
  if bits == 0 or not digits then return other, 0 end
  local limit = 2 ^ (bits == 32 and 31 or 53)

  local function reserve(number)
    if number <= limit / 2 or number >= limit or number % 1 ~= 0 then return false end
    local had = redis.pcall('GET', number_key(number))
    if had and had ~= name then return false end
    redis.call('SET', number_key(number), name, 'PX', ms)
    return true
  end

  if reserve(held) then return other, held end
  local own = low_bits(digits, bits)
  if not other and (own <= limit / 2 or own >= limit) then return other, 0 end
  if not other and reserve(own) then return other, own end
  local number
  repeat
    number = limit - 1 - on_numbers('HINCRBY', 'last', 1) % (limit / 2 - 1)
  until reserve(number)
  return other, number
end
