// Accumulators in the asm statements of the WGMMAs: their names in the text, %0 onwards, and the operands themselves.
#pragma once

#define WGMMA_NAMES_4 "%0, %1, %2, %3"
#define WGMMA_NAMES_8 WGMMA_NAMES_4 ", %4, %5, %6, %7"
#define WGMMA_NAMES_16 WGMMA_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_NAMES_32 \
    WGMMA_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_NAMES_64 \
    WGMMA_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
                   "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_NAMES_128 \
    WGMMA_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
                   "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
                   "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
                   "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// d[first] onwards.
#define WGMMA_SUMS_4(d, first) "+f"(d[first]), "+f"(d[first + 1]), "+f"(d[first + 2]), "+f"(d[first + 3])
#define WGMMA_SUMS_8(d, first) WGMMA_SUMS_4(d, first), WGMMA_SUMS_4(d, first + 4)
#define WGMMA_SUMS_16(d, first) WGMMA_SUMS_8(d, first), WGMMA_SUMS_8(d, first + 8)
#define WGMMA_SUMS_32(d, first) WGMMA_SUMS_16(d, first), WGMMA_SUMS_16(d, first + 16)
#define WGMMA_SUMS_64(d, first) WGMMA_SUMS_32(d, first), WGMMA_SUMS_32(d, first + 32)
